metadata description = 'The Azure resources of imds-bridge: Service Bus, and optionally Event Grid, a Logic App, a Function and the console.'

@description('Name of the Service Bus namespace, unique in all of Azure.')
@minLength(6)
@maxLength(50)
param namespaceName string

@description('Principal ids of the managed identities that run imds-bridge forward.')
param forwardPrincipalIds string[]

@description('Principal ids of the managed identities that run imds-bridge listen; they may be the same.')
param listenPrincipalIds string[] = []

@description('Principal ids of the managed identities that run imds-bridge relay.')
param relayPrincipalIds string[] = []

@description('Object ids of users, groups or identities that may send approve commands and read the receipts.')
param approverPrincipalIds string[] = []

@description('Principal type of all the approvers; a group can contain users and managed identities.')
@allowed(['Group', 'ServicePrincipal', 'User'])
param approverPrincipalType string = 'Group'

@description('Object ids of users, groups or identities that may read the audit subscription.')
param auditPrincipalIds string[] = []

@description('Principal type of the readers of the audit subscription.')
@allowed(['Group', 'ServicePrincipal', 'User'])
param auditPrincipalType string = 'Group'

param location string = resourceGroup().location
param tags object = {}

@description('Topics and sessions need Standard at least; private endpoints need Premium. It is chosen once: a deployment cannot turn a Standard namespace into a Premium one.')
@allowed(['Standard', 'Premium'])
param sku string = 'Standard'

@description('Messaging units, only for Premium.')
@allowed([1, 2, 4, 8, 16])
param capacity int = 1

@maxLength(260)
param topicName string = 'scheduled-events'
@maxLength(260)
param queueName string = 'approvals'

@description('Name of an Event Grid topic for the same events; empty: none.')
@maxLength(50)
param eventGridTopicName string = ''

@description('Whether the Event Grid topic gets an identity, which its subscriptions need to deliver to queues that accept no keys.')
param eventGridIdentity bool = false

@description('Name of a Logic App that asks in Teams for approvals; empty: none.')
@maxLength(80)
param logicAppName string = ''

@description('Ids of the team and the channel in which it asks; it needs both.')
param teamId string = ''
param channelId string = ''

@description('Name of a Function app that keeps an audit trail, unique in all of Azure; empty: none.')
@maxLength(60)
param functionName string = ''

@description('Name of the storage account of the Function app.')
@minLength(3)
@maxLength(24)
param functionStorageName string = 'audit${uniqueString(resourceGroup().id, functionName)}'

@description('Resource id of a subnet for the Function app, delegated to Microsoft.App/environments and with the service endpoint Microsoft.Storage; empty: one is created.')
param functionSubnetId string = ''

@description('Public addresses that may reach the storage of the Function app, to read its table.')
param functionStorageAllowedIpRanges string[] = []

@description('URL of the Key Vault secret with the listeners\' signing secrets, with which the Function app checks receipts; empty: it does not check them.')
param functionSigningSecretUrl string = ''

@description('Name of a console on Container Apps, and of its managed identity, which has to exist; empty: none.')
@maxLength(32)
param consoleName string = ''

@description('The image that the Dockerfile builds; the console needs one.')
param consoleImage string = ''

@description('Login server of the registry that the console\'s identity may pull from; empty: the image is public.')
param consoleRegistry string = ''

@description('Client id of the app registration with which people sign in to the console, which needs one.')
param consoleClientId string = ''

@description('App roles or group ids that may look at the console; empty: everybody who may sign in.')
param consoleViewers string[] = []

@description('App roles or group ids that may approve in the console; empty: approvals are off there.')
param consoleApprovers string[] = []

@description('URL of the Key Vault secret that signs the console\'s commands; empty: they are not signed.')
param consoleSigningSecretUrl string = ''

@description('`session` of the listeners\' [approvals]. Where the queue serves several subscriptions: {subscription}.{resource_group}.{vm}')
param consoleApprovalSession string = '{resource_group}.{vm}'

@description('Resource id of a subnet for the console, delegated to Microsoft.App/environments; empty: none. It cannot be changed later.')
param consoleSubnetId string = ''

@description('Whether public networks may reach the namespace and the Event Grid topic. Each deployment sets it: what is closed belongs into the parameters. Disabled leaves only private endpoints.')
@allowed(['Enabled', 'Disabled'])
param publicNetworkAccess string = 'Enabled'

@description('Public addresses that may reach them, such as 203.0.113.0/24; empty: all.')
param allowedIpRanges string[] = []

@description('Resource id of a subnet for private endpoints of the namespace and the Event Grid topic; empty: none. They need Premium.')
param privateEndpointSubnetId string = ''

@description('Resource ids of the private DNS zones privatelink.servicebus.windows.net and privatelink.eventgrid.azure.net; empty: the records are made elsewhere.')
param serviceBusDnsZoneId string = ''
param eventGridDnsZoneId string = ''

@description('Resource ids of the action groups that are notified of dead letters, a topic that fills up and throttling.')
param actionGroupIds string[] = []

@description('Resource id of a Log Analytics workspace for logs and metrics; empty: none.')
param workspaceId string = ''

var isNotice = 'cloudEvents_type LIKE \'io.imdsbridge.scheduledevent.%\''
var isReceipt = 'cloudEvents_type LIKE \'io.imdsbridge.approval.%\''

// Somebody who is named twice gets a role once; Azure compares without regard to case, and refuses a second spelling.
var publisherIds = union(forwardPrincipalIds, listenPrincipalIds)
var listenerIds = union(listenPrincipalIds, [])
var relayIds = union(relayPrincipalIds, [])
var approverIds = union(approverPrincipalIds, [])
var auditIds = union(auditPrincipalIds, [])
var principals = [publisherIds, listenerIds, relayIds, approverIds, auditIds]
var spelledTwice = join(flatten(filter(principals, ids => length(union(map(ids, id => toLower(id)), [])) < length(ids))), ', ')

// One endpoint is named as the namespace, the other as the topic, unless both have one name.
var gridEndpointName = (toLower(eventGridTopicName) == toLower(namespaceName)) ? '${eventGridTopicName}-topic' : eventGridTopicName

// What Azure refuses only after minutes, or with a text that names no parameter, is refused at once. Without the
// characters that it may have, nothing is left of a name.
var lowerAlphanumeric = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k', 'l', 'm', 'n', 'o', 'p', 'q', 'r', 's', 't', 'u', 'v', 'w', 'x', 'y', 'z', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
var hyphenated = concat(lowerAlphanumeric, ['-'])
var punctuated = concat(hyphenated, ['_', '.', '(', ')'])
var checks = [
  {
    isWrong: !empty(join(split(toLower(namespaceName), hyphenated), ''))
    fault: 'namespaceName: given ${namespaceName}, expected letters, digits and hyphens'
  }
  {
    isWrong: endsWith(namespaceName, '-') || endsWith(namespaceName, '-sb') || endsWith(namespaceName, '-mgmt')
    fault: 'namespaceName: given ${namespaceName}, expected an end other than -, -sb and -mgmt'
  }
  {
    isWrong: !empty(join(split(toLower(take(namespaceName, 1)), take(lowerAlphanumeric, 26)), ''))
    fault: 'namespaceName: given ${namespaceName}, expected a letter at its beginning'
  }
  {
    isWrong: toLower(topicName) == toLower(queueName)
    fault: 'queueName: given ${queueName}, expected another name than topicName'
  }
  {
    isWrong: !empty(join(split(toLower(eventGridTopicName), hyphenated), ''))
    fault: 'eventGridTopicName: given ${eventGridTopicName}, expected letters, digits and hyphens'
  }
  {
    isWrong: !empty(join(split(toLower(logicAppName), punctuated), ''))
    fault: 'logicAppName: given ${logicAppName}, expected letters, digits and -_.()'
  }
  {
    isWrong: !empty(logicAppName) && (empty(teamId) || empty(channelId))
    fault: 'logicAppName needs teamId and channelId'
  }
  {
    isWrong: !empty(join(split(toLower(functionName), hyphenated), ''))
    fault: 'functionName: given ${functionName}, expected letters, digits and hyphens'
  }
  {
    isWrong: !empty(join(split(functionStorageName, lowerAlphanumeric), ''))
    fault: 'functionStorageName: given ${functionStorageName}, expected lower-case letters and digits'
  }
  {
    isWrong: !empty(join(split(consoleName, hyphenated), ''))
    fault: 'consoleName: given ${consoleName}, expected lower-case letters, digits and hyphens'
  }
  {
    isWrong: length(consoleName) == 1
    fault: 'consoleName: given ${consoleName}, expected 2 to 32 characters'
  }
  {
    isWrong: !empty(consoleName) && (empty(consoleImage) || empty(consoleClientId))
    fault: 'consoleName needs consoleImage and consoleClientId'
  }
  {
    isWrong: !empty(privateEndpointSubnetId) && (sku != 'Premium')
    fault: 'privateEndpointSubnetId needs sku Premium'
  }
]
var faults = join(map(filter(checks, one => one.isWrong), one => one.fault), '; ')

module bus 'modules/servicebus.bicep' = {
  name: 'imds-bridge-servicebus'
  params: {
    name: empty(faults) ? namespaceName : fail(faults)
    location: location
    tags: tags
    sku: sku
    capacity: capacity
    topicName: topicName
    queueName: queueName
    publisherIds: empty(spelledTwice) ? publisherIds : fail('principal ids: given two spellings of one among ${spelledTwice}, expected one')
    listenerIds: listenerIds
    approverIds: approverIds
    approverType: approverPrincipalType
    publicNetworkAccess: publicNetworkAccess
    allowedIpRanges: allowedIpRanges
    workspaceId: workspaceId
  }
}

module alerts 'modules/alerts.bicep' = {
  name: 'imds-bridge-alerts'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    topicMegabytes: bus.outputs.topicMegabytes
    tags: tags
    actionGroupIds: actionGroupIds
  }
}

module busEndpoint 'modules/privateendpoint.bicep' = if (!empty(privateEndpointSubnetId)) {
  name: 'imds-bridge-servicebus-endpoint'
  params: {
    name: namespaceName
    location: location
    tags: tags
    subnetId: privateEndpointSubnetId
    targetId: bus.outputs.id
    groupId: 'namespace'
    dnsZoneId: serviceBusDnsZoneId
  }
}

// A subscription without a reader would only fill the topic, so each is created only with a reader.
module audit 'modules/subscription.bicep' = if (!empty(auditPrincipalIds)) {
  name: 'imds-bridge-audit'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: 'audit'
    receiverIds: auditIds
    receiverType: auditPrincipalType
  }
  dependsOn: [
    bus
  ]
}

module relay 'modules/subscription.bicep' = if (!empty(relayPrincipalIds)) {
  name: 'imds-bridge-relay'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: 'relay'
    filter: '${isNotice} OR ${isReceipt}'
    timeToLive: 'P1D'
    deadLetterExpired: false // old events are not worth a chat message
    receiverIds: relayIds
  }
  dependsOn: [
    bus
  ]
}

module receiptsRead 'modules/subscription.bicep' = if (!empty(approverPrincipalIds)) {
  name: 'imds-bridge-receipts'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: 'receipts'
    filter: isReceipt
    timeToLive: 'PT1H'
    deadLetterExpired: false // approve --wait only peeks at receipts
    receiverIds: approverIds
    receiverType: approverPrincipalType
  }
  dependsOn: [
    bus
  ]
}

module grid 'modules/eventgrid.bicep' = if (!empty(eventGridTopicName)) {
  name: 'imds-bridge-eventgrid'
  params: {
    name: eventGridTopicName
    location: location
    tags: tags
    publisherIds: publisherIds
    hasIdentity: eventGridIdentity
    publicNetworkAccess: publicNetworkAccess
    allowedIpRanges: allowedIpRanges
    workspaceId: workspaceId
  }
}

module gridEndpoint 'modules/privateendpoint.bicep' = if (!empty(eventGridTopicName) && !empty(privateEndpointSubnetId)) {
  name: 'imds-bridge-eventgrid-endpoint'
  params: {
    name: gridEndpointName
    location: location
    tags: tags
    subnetId: privateEndpointSubnetId
    targetId: grid!.outputs.id
    groupId: 'topic'
    dnsZoneId: eventGridDnsZoneId
  }
}

module logicApp 'modules/logicapp.bicep' = if (!empty(logicAppName)) {
  name: 'imds-bridge-logicapp'
  params: {
    name: logicAppName
    location: location
    tags: tags
    namespaceName: namespaceName
    hostName: bus.outputs.hostName
    topicName: topicName
    queueName: queueName
    teamId: teamId
    channelId: channelId
    workspaceId: workspaceId
  }
}

module function 'modules/function.bicep' = if (!empty(functionName)) {
  name: 'imds-bridge-function'
  params: {
    name: functionName
    storageName: functionStorageName
    location: location
    tags: tags
    namespaceName: namespaceName
    hostName: bus.outputs.hostName
    topicName: topicName
    subnetId: functionSubnetId
    storageAllowedIpRanges: functionStorageAllowedIpRanges
    signingSecretUrl: functionSigningSecretUrl
    workspaceId: workspaceId
  }
}

module console 'modules/console.bicep' = if (!empty(consoleName)) {
  name: 'imds-bridge-console'
  params: {
    name: consoleName
    location: location
    tags: tags
    namespaceName: namespaceName
    hostName: bus.outputs.hostName
    topicName: topicName
    queueName: queueName
    image: consoleImage
    registry: consoleRegistry
    clientId: consoleClientId
    viewers: consoleViewers
    approvers: consoleApprovers
    signingSecretUrl: consoleSigningSecretUrl
    approvalSession: consoleApprovalSession
    subnetId: consoleSubnetId
    workspaceId: workspaceId
  }
}

output namespace string = bus.outputs.hostName
output topic string = topicName
output queue string = queueName
output eventGridEndpoint string = empty(eventGridTopicName) ? '' : grid!.outputs.endpoint
output consoleUrl string = empty(consoleName) ? '' : console!.outputs.url
