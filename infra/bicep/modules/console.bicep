metadata description = 'The console on Container Apps behind Entra ID. It reads its own subscription with its own identity.'

@description('Name of the container app, of its environment, and of the managed identity, which has to exist.')
param name string
param location string
param tags object
param namespaceName string
param hostName string
param topicName string
param queueName string
param image string

@description('Login server of the registry that the identity may pull from; empty: the image is public.')
param registry string

@description('Client id of the app registration that people sign in to.')
param clientId string

@description('App roles or group ids that may look; empty: everybody who may sign in.')
param viewers string[]

@description('App roles or group ids that may approve; empty: approvals are off.')
param approvers string[]

@description('URL of the Key Vault secret that signs commands; empty: they are not signed.')
param signingSecretUrl string

@description('`session` of the listeners.')
param approvalSession string

@description('Resource id of the subnet of its environment; empty: none, and it reaches public addresses only.')
param subnetId string

@description('Resource id of a Log Analytics workspace for logs; empty: none.')
param workspaceId string

var subscriptionName = 'console'
var port = 8080
var approves = !empty(approvers)
var signs = approves && !empty(signingSecretUrl)
// Container Apps knows this name: the identity in it signs in for the app registration, in place of a secret.
var federated = 'override-use-mi-fic-assertion-client-id'

resource identity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' existing = {
  name: name
}

// For this app alone, so that no other app can reach it without passing its sign-in.
resource managedEnvironment 'Microsoft.App/managedEnvironments@2025-01-01' = {
  name: name
  location: location
  tags: tags
  properties: {
    appLogsConfiguration: {
      destination: empty(workspaceId) ? 'none' : 'azure-monitor'
    }
    vnetConfiguration: empty(subnetId) ? null : {
      infrastructureSubnetId: subnetId
    }
    workloadProfiles: [
      {
        name: 'Consumption'
        workloadProfileType: 'Consumption'
      }
    ]
  }
}

resource logs 'Microsoft.Insights/diagnosticSettings@2021-05-01-preview' = if (!empty(workspaceId)) {
  scope: managedEnvironment
  name: 'imds-bridge'
  properties: {
    workspaceId: workspaceId
    logs: [
      {
        categoryGroup: 'allLogs'
        enabled: true
      }
    ]
  }
}

var url = 'https://${name}.${managedEnvironment.properties.defaultDomain}'

var settings = [
  {
    name: 'IMDS_BRIDGE__CONSOLE__LISTEN'
    value: '0.0.0.0:${port}'
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__AUTH'
    value: 'easyauth'
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__PUBLIC_URL'
    value: url
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__VIEWER_GROUPS'
    value: string(viewers)
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__BUS__NAMESPACE'
    value: hostName
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__BUS__TOPIC'
    value: topicName
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__BUS__SUBSCRIPTION'
    value: subscriptionName
  }
  {
    name: 'IMDS_BRIDGE__CONSOLE__BUS__CLIENT_ID'
    value: identity.properties.clientId
  }
]

var approvalSettings = [
  {
    name: 'IMDS_BRIDGE__CONSOLE__APPROVER_GROUPS'
    value: string(approvers)
  }
  {
    name: 'IMDS_BRIDGE__APPROVALS__NAMESPACE'
    value: hostName
  }
  {
    name: 'IMDS_BRIDGE__APPROVALS__QUEUE'
    value: queueName
  }
  {
    name: 'IMDS_BRIDGE__APPROVALS__SESSION'
    value: approvalSession
  }
  {
    name: 'IMDS_BRIDGE__APPROVALS__CLIENT_ID'
    value: identity.properties.clientId
  }
]

var signingSettings = [
  {
    name: 'IMDS_BRIDGE__APPROVALS__SIGNING_SECRET'
    secretRef: 'signing-secret'
  }
]

var federatedSecrets = [
  {
    name: federated
    value: identity.properties.clientId
  }
]

var signingSecrets = [
  {
    name: 'signing-secret'
    keyVaultUrl: signingSecretUrl
    identity: identity.id
  }
]

resource app 'Microsoft.App/containerApps@2025-01-01' = {
  name: name
  location: location
  tags: tags
  identity: {
    type: 'UserAssigned'
    userAssignedIdentities: {
      '${identity.id}': {}
    }
  }
  properties: {
    environmentId: managedEnvironment.id
    workloadProfileName: 'Consumption'
    configuration: {
      activeRevisionsMode: 'Single'
      ingress: {
        external: true
        targetPort: port
        transport: 'http'
        allowInsecure: false
      }
      registries: empty(registry) ? [] : [
        {
          server: registry
          identity: identity.id
        }
      ]
      secrets: concat(federatedSecrets, signs ? signingSecrets : [])
    }
    template: {
      containers: [
        {
          name: 'console'
          image: image
          args: [
            'console'
          ]
          env: concat(settings, approves ? approvalSettings : [], signs ? signingSettings : [])
          resources: {
            cpu: json('0.5') // with less, the volume has 1 GiB
            memory: '1Gi'
          }
          probes: [
            {
              type: 'Startup'
              httpGet: {
                path: '/livez'
                port: port
              }
              initialDelaySeconds: 3
              periodSeconds: 10
              timeoutSeconds: 5
              failureThreshold: 10
            }
            {
              type: 'Liveness'
              httpGet: {
                path: '/livez'
                port: port
              }
              periodSeconds: 30
              timeoutSeconds: 10
              failureThreshold: 4
            }
            // Not /readyz, which fails while the bus does: the pages are needed then, and say so. And the identity
            // may receive only once the app has its sign-in, after the app is ready.
            {
              type: 'Readiness'
              httpGet: {
                path: '/livez'
                port: port
              }
              periodSeconds: 10
              timeoutSeconds: 5
            }
          ]
          volumeMounts: [
            {
              volumeName: 'state'
              mountPath: '/var/lib/imds-bridge'
            }
          ]
        }
      ]
      // One: the store has one writer, and two would share the events between them.
      scale: {
        minReplicas: 1
        maxReplicas: 1
      }
      // No file share: SQLite's log needs a local file system. It is empty again in each new replica.
      volumes: [
        {
          name: 'state'
          storageType: 'EmptyDir'
        }
      ]
      terminationGracePeriodSeconds: 45
    }
  }
}

// No path is excluded: events come over the bus, and the probes do not pass the sign-in.
resource auth 'Microsoft.App/containerApps/authConfigs@2025-01-01' = {
  parent: app
  name: 'current'
  properties: {
    platform: {
      enabled: true
    }
    globalValidation: {
      unauthenticatedClientAction: 'RedirectToLoginPage'
      redirectToProvider: 'azureactivedirectory'
    }
    httpSettings: {
      requireHttps: true
    }
    identityProviders: {
      azureActiveDirectory: {
        enabled: true
        registration: {
          clientId: clientId
          clientSecretSettingName: federated
          openIdIssuer: '${environment().authentication.loginEndpoint}${tenant().tenantId}/v2.0'
        }
        validation: {
          defaultAuthorizationPolicy: {
            allowedApplications: [
              clientId
            ]
          }
        }
      }
    }
  }
}

// The roles come after the sign-in: until then anybody could pretend to be signed in, to a console without events.
module subscribed 'subscription.bicep' = {
  name: 'imds-bridge-console-subscription'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: subscriptionName
    deadLetterExpired: false
    receiverIds: [
      identity.properties.principalId
    ]
  }
  dependsOn: [
    auth
  ]
}

module sends 'sender.bicep' = if (approves) {
  name: 'imds-bridge-console-sender'
  params: {
    namespaceName: namespaceName
    queueName: queueName
    principalId: identity.properties.principalId
  }
  dependsOn: [
    auth
  ]
}

output url string = url
